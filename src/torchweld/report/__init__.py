"""All text for people, and files for other tools. Data in, string or plain data out.

- profiles: `profile_text.py` puts the sections together (`profile_verdict.py`, `module_tree.py`,
  `op_table.py`, `device_section.py`, `profile_sections.py`), `profile_json.py` is the same as data,
  `diff_text.py` shows two of them
- other tools: `trace_exports.py` writes chrome traces, folded stacks and speedscope files from
  `trace_timeline.py` and `flame_stacks.py`
- all else: `plan_text.py`, `bench_text.py` with its tables and extras, `gate_text.py`,
  `run_text.py` for the history
- `text_style.py`: columns, tables, bars, and the last look at every character
"""

from torchweld.report.diff_text import diff_sections
from torchweld.report.profile_json import summary
from torchweld.report.profile_text import View, brief_sections, profile_sections, profile_text
from torchweld.report.trace_exports import chrome_trace, folded, speedscope

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
