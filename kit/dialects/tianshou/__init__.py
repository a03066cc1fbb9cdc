"""The words of tianshou (https://github.com/thu-ml/tianshou), of both its generations."""

from __future__ import annotations

from kit.dialects.tianshou.settings import Tianshou as Tianshou
from kit.dialects.tianshou.settings import Tianshou2 as Tianshou2
