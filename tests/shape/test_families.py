import subprocess
import sys

import pytest

from diptych.core.errors import ConfigError
from diptych.shape.families import family


def test_family_is_found_by_name():
    assert family("qwen3_vl").name == "qwen3_vl"


def test_misspelt_family_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'qwen3-vl'.*Did you mean 'qwen3_vl'"):
        family("qwen3-vl")


def test_shape_and_plan_import_no_torch():
    code = (
        "import sys, diptych.shape.families, diptych.plan.search, diptych.plan.hardware, "
        "diptych.model.inspect\n"
        "assert not {'torch', 'transformers', 'kedro'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
