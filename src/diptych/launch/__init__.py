"""A run spec in, ranks started, followed and ended, a `Run` out. No torch, no Kedro."""
