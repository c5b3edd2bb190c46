"""Whether a report is what ``kvedit.request.report`` declares, to the key."""

from __future__ import annotations

from typing import Any

import msgspec

from kvedit.request.report import BatchReport, PromptReport


def checked(report: Any) -> Any:
    """``report`` itself. Raises msgspec.ValidationError for a key or a type not declared."""
    msgspec.convert(report, BatchReport if "prompts" in report else PromptReport)
    return report
