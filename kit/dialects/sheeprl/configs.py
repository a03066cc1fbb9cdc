"""sheeprl's config files: experiments, which Hydra composes, and composed configurations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kit.dialects.base import Dialect
from kit.dialects.files import load
from kit.steps.errors import SettingError, nearest_first
from kit.steps.values import flat

_GROUPS = ("exp", "algo", "env")


def configuration(
    cls: type[Dialect], settings: dict[str, Any], path: Path | None
) -> dict[str, Any] | None:
    """Return the configuration that ``exp`` or a file selects, keyed by dotted name.

    Args:
        cls: dialect class.
        settings: settings with precedence over config files. Settings that select config files are
            removed, and settings of environments that are no fields of the dialect.
        path: experiment with a defaults list, or a composed ``config.yaml``.

    Raises:
        SettingError: if sheeprl's config files are not available, or do not contain an option.
    """
    from omegaconf import OmegaConf

    content = {} if path is None else load(path)
    if "exp" in settings or "defaults" in content:
        config = _compose(cls, settings, path)
    elif selected := settings.keys() & {"configs", "env"}:
        reason, name = "This setting selects config files for an experiment", min(selected)
        raise SettingError(name, settings[name], reason, "Also set exp, such as exp=dreamer_v3")
    elif path is None:
        return None
    else:
        config = OmegaConf.create(content)
    names = flat(OmegaConf.to_container(config))
    for name in [*settings]:
        paths = [path for path, field in cls.PATHS.items() if field == name]
        for place in {name, *paths, f"algo.{name}", f"env.{name}"} & names.keys():
            OmegaConf.update(config, place, settings[name])
        if name in names and (name == "env.id" or name.startswith("env.wrapper.")):
            del settings[name]
    values = {name: _resolve(config, name) for name in names}
    if values.get("buffer.size") == values.get("algo.rollout_steps"):
        values.pop("buffer.size", None)  # It must equal rollout_steps, which can still change.
    return values | {"env.id": _env_id(values)}


def experiment_file(settings: Mapping[str, Any]) -> Path | None:
    """Return the file of the experiment that ``exp`` selects, or ``None`` without ``exp``."""
    return None if "exp" not in settings else _folder(settings) / f"exp/{settings['exp']}.yaml"


def _compose(cls: type[Dialect], settings: dict[str, Any], path: Path | None) -> Any:
    """Compose the experiment in sheeprl's config groups, and remove the selecting settings."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if path is not None and "exp" in settings:
        reason = "An experiment cannot be combined with a config file"
        raise SettingError("exp", settings["exp"], reason, "Omit exp or the file")
    folder = _folder(settings if path is None else {"file": str(path), **settings})
    from_package = settings.pop("configs", None) is None
    choices = {group: settings.pop(group) for group in _GROUPS if group in settings}
    for group, choice in choices.items():
        options = sorted(file.stem for file in (folder / group).glob("*.yaml"))
        if choice not in options:
            reason = "This option does not exist in the config files of sheeprl"
            raise SettingError(group, choice, reason, nearest_first(choice, options)[:3])
    try:
        config = _composed(folder, choices, path)
    except (HydraException, OmegaConfBaseException) as error:
        field, value = ("exp", choices["exp"]) if path is None else ("file", str(path))
        reason = f"Hydra cannot compose the experiment: {str(error).strip().splitlines()[0]}"
        raise SettingError(field, value, reason) from None
    with suppress(PackageNotFoundError):
        if from_package and version("sheeprl") in cls.VERSIONS:
            OmegaConf.update(config, "version", version("sheeprl"), force_add=True)
    return config


def _composed(folder: Path, choices: Mapping[str, str], path: Path | None) -> Any:
    from hydra import compose, initialize_config_dir

    overrides = [f"{group}={choice}" for group, choice in choices.items()]
    if path is None:
        with initialize_config_dir(str(folder), version_base="1.3"):
            return compose("config", overrides)
    if "@package _global_" not in path.read_text(encoding="utf-8"):
        reason = "The file does not begin with '# @package _global_', so Hydra would not apply it"
        raise SettingError("file", str(path), reason, "Add this line")
    # Hydra reads experiments from a folder named exp.
    with TemporaryDirectory() as root:
        Path(root, "exp").symlink_to(path.parent.resolve())
        Path(root, "config.yaml").symlink_to(folder / "config.yaml")
        with initialize_config_dir(root, version_base="1.3"):
            places = f"hydra.searchpath=['file://{folder}']"
            return compose("config", [f"exp='{path.stem}'", places, *overrides])


def _folder(settings: Mapping[str, Any]) -> Path:
    """Return the folder with sheeprl's config groups: ``configs``, or the one of the package."""
    if (given := settings.get("configs")) is not None:
        folders = [Path(str(given))]
    else:
        spec = find_spec("sheeprl")
        roots = spec.submodule_search_locations if spec is not None else None
        folders = [Path(root) / "configs" for root in roots or []]
    for folder in folders:
        if (folder / "config.yaml").is_file():
            return folder.resolve()
    if given is not None:
        reason, hint = "The folder has no config.yaml", "Use the folder sheeprl/configs of sheeprl"
        raise SettingError("configs", given, reason, hint)
    field = "file" if "file" in settings else "exp"
    reason = "The experiment needs the config files of sheeprl, which is not installed"
    hint = "Run pip install --no-deps sheeprl, or set configs=path/to/sheeprl/configs"
    raise SettingError(field, settings[field], reason, hint)


def _resolve(config: Any, name: str) -> Any:
    """Return a value without interpolations, or ``"???"`` if it is missing or unknown."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.select(config, name, throw_on_missing=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:  # For example, ${hydra:runtime.cwd} exists only within Hydra.
        return "???"


def _env_id(values: Mapping[str, Any]) -> Any:
    """Return the Gymnasium ID of sheeprl's environment, or sheeprl's own name for others."""
    name, wrapper = values.get("env.id", "???"), str(values.get("env.wrapper._target_"))
    if wrapper.endswith("AtariPreprocessing") and ":" not in name:
        return f"ale_py:{name}"
    if wrapper.endswith("DMCWrapper"):
        domain, task = (values.get(f"env.wrapper.{part}_name") for part in ("domain", "task"))
        return f"dm_control/{domain}-{task}-v0"
    return name
