"""`import specstop`: the public names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import specstop.decode as decode_package

import specstop as ss


def test_every_public_name_can_be_imported() -> None:
    assert {"load_pair", "load_trace", "load_profile", "load_policy", "collect", "measure_profile"} <= set(dir(ss))
    assert {"train", "evaluate", "decode", "bench", "replay", "StopPolicy", "custom_feature"} <= set(dir(ss))
    for name in ss.__all__:
        assert getattr(ss, name) is not None
    assert ss.__version__[0].isdigit()
    assert (Path(ss.__file__).parent / "py.typed").is_file()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="evaluat"):
        ss.evaluat  # noqa: B018


@pytest.mark.parametrize("name", ["collect", "decode", "train"])
def test_a_package_can_be_called_like_its_function(name: str) -> None:
    package = getattr(ss, name)
    assert package is sys.modules[f"specstop.{name}"]
    assert inspect.signature(package) == inspect.signature(getattr(package, name))
    with pytest.raises(TypeError):
        package()


def test_packages_stay_modules() -> None:
    assert decode_package.Settings is ss.Settings and ss.decode.Settings is ss.Settings  # type: ignore[attr-defined]


def test_the_import_loads_no_library() -> None:
    code = "import sys, specstop; print([name for name in ('numpy', 'torch', 'numba', 'rich') if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
