"""Checks of errors by the setting that they name, not by their wording."""

from __future__ import annotations

import pytest

from kit.steps import SettingError


class raises_setting(pytest.RaisesExc[SettingError]):  # noqa: N801  # used as pytest.raises
    """Expect a :class:`SettingError` of a setting.

    Args:
        field: name of the setting, as the error has it.
        value: the rejected value, if it matters.
    """

    def __init__(self, field: str, value: object = ...) -> None:
        def is_of_field(error: SettingError) -> bool:
            return error.field == field and (value is ... or error.value == value)

        super().__init__(SettingError, check=is_of_field)
