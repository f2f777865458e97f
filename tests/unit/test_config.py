"""Settings: defaults, what is read when, and the errors for values that are not allowed."""
import re
from pathlib import Path

import pytest

from tinygrad_nv import config
from tinygrad_nv.errors import ConfigError

PACKAGE = Path(config.__file__).parent


@pytest.mark.parametrize("setting", config.SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_has_an_allowed_default_and_a_meaning(setting, monkeypatch):
    monkeypatch.delenv(setting.name, raising=False)
    assert config.get(setting.name) == setting.default
    assert setting.default in setting.allowed
    assert all(f"{value}: " in setting.meaning for value in setting.allowed if value != setting.default)


@pytest.mark.parametrize("setting", config.SETTINGS, ids=lambda setting: setting.name)
def test_the_environment_is_read_at_each_call(setting, monkeypatch):
    for value in setting.allowed:
        monkeypatch.setenv(setting.name, f" {value} ")
        assert config.get(setting.name) == value
    monkeypatch.setenv(setting.name, "")
    assert config.get(setting.name) == setting.default


@pytest.mark.parametrize("text", ["2", "yes", "-1", "1.0"])
def test_a_value_that_is_not_allowed_is_an_error_with_the_allowed_ones(text, monkeypatch):
    monkeypatch.setenv("NV", text)
    with pytest.raises(ConfigError) as caught: config.get("NV")
    assert str(caught.value).splitlines()[0] == f"NV={text}"
    assert "one of 0, 1 (0: importing tinygrad_nv changes no schedule" in caught.value.expected
    assert caught.value.fix == "unset NV for its default, 1"


def test_a_number_may_be_any(monkeypatch):
    monkeypatch.setenv("NV_REPACK_CACHE", "200")
    assert config.get("NV_REPACK_CACHE") == 200
    for text in ("-1", "1.5", "all", "²"):
        monkeypatch.setenv("NV_REPACK_CACHE", text)
        with pytest.raises(ConfigError) as caught: config.get("NV_REPACK_CACHE")
        assert str(caught.value).splitlines()[0] == f"NV_REPACK_CACHE={text}"
        assert caught.value.expected.startswith("an integer from 0 on (GB of the cache directory")
        assert caught.value.fix == "unset NV_REPACK_CACHE for its default, 48"


def test_a_setting_without_a_row_is_our_mistake():
    with pytest.raises(KeyError): config.get("NV_UNKNOWN")


def test_every_setting_is_read_somewhere_and_nothing_is_read_without_a_row():
    folders = (PACKAGE, PACKAGE.parent / "models")
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")
               if path != PACKAGE / "config.py"]
    read = {name for source in sources for name in re.findall(r'config\.get\("((?:NV|EMU)\w*)"\)', source)}
    assert read == {setting.name for setting in config.SETTINGS}
    around = re.compile(r'environ(?:\.get\(|\[)"((?:NV|EMU)\w*)"')
    assert not [name for source in sources for name in around.findall(source)]
