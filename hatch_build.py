"""Build hook: an editable install gets the `.pth` file too, so that bare Gymnasium ids work there as well.

The module it imports stays in the checkout, which the editable install's own `.pth` has put on the path before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GymnasiumHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds `sao_gymnasium_hook.pth` to editable wheels; ordinary wheels have it by `force-include`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel; `version` is "standard" or "editable"."""
        if version == "editable":
            name = "sao_gymnasium_hook.pth"
            build_data["force_include_editable"][str(Path(self.root) / name)] = name
