"""Profiles and diffs for people and for other tools. Data in, text or plain data out.

`text.py`: a profile on a terminal. `changes.py`: a diff. `summary.py`: the same as plain data.
`exports.py`: chrome traces, folded stacks, speedscope.
"""

from torchweld.report.diff_text import diff_sections
from torchweld.report.exports import chrome_trace, folded, speedscope
from torchweld.report.profile_json import summary
from torchweld.report.profile_text import View, brief_sections, profile_sections, profile_text

__all__ = [
    "View",
    "brief_sections",
    "chrome_trace",
    "diff_sections",
    "folded",
    "profile_sections",
    "profile_text",
    "speedscope",
    "summary",
]
