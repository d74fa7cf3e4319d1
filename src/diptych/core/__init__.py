"""What every other folder may import: records, errors, axes, units. No torch, no Kedro."""
