"""The records that cross folders, in the order in which the workflow makes them.

Each is frozen, refuses unknown keys and is kept as JSON. Tables (sample_index, quarantine,
sample_costs) are Parquet; their columns are in `core/tables.py`. A `Section` is a part of the YAML
parameters; it lives beside the function that takes it and has a default for every field.
"""

from diptych.core.records.base import (
    FORMAT_VERSION,
    Record,
    Section,
)
from diptych.core.records.data import (
    IMAGE_PLACEHOLDER,
    Buckets,
    ImageRef,
    ImageSettings,
    Manifest,
    Message,
    ProcessorInfo,
    RawPart,
    RawSamples,
    RawSource,
    Sample,
    Shard,
    TokenIds,
)
from diptych.core.records.model import (
    ModelShape,
    ModelSpec,
    Parameter,
)
from diptych.core.records.plan import (
    Cluster,
    Device,
    Layout,
    Plan,
    Prediction,
)
from diptych.core.records.results import (
    Interval,
    Lineage,
    Link,
    Parity,
    Scores,
    Summary,
)
from diptych.core.records.run import (
    Identity,
    LoaderState,
    OptimizerSpec,
    Placement,
    Provenance,
    Run,
    RunSpec,
    ScheduleSpec,
    StepRecord,
)

__all__ = [
    "FORMAT_VERSION",
    "IMAGE_PLACEHOLDER",
    "Buckets",
    "Cluster",
    "Device",
    "Identity",
    "ImageRef",
    "ImageSettings",
    "Interval",
    "Layout",
    "Lineage",
    "Link",
    "LoaderState",
    "Manifest",
    "Message",
    "ModelShape",
    "ModelSpec",
    "OptimizerSpec",
    "Parameter",
    "Parity",
    "Placement",
    "Plan",
    "Prediction",
    "ProcessorInfo",
    "Provenance",
    "RawPart",
    "RawSamples",
    "RawSource",
    "Record",
    "Run",
    "RunSpec",
    "Sample",
    "ScheduleSpec",
    "Scores",
    "Section",
    "Shard",
    "StepRecord",
    "Summary",
    "TokenIds",
]
