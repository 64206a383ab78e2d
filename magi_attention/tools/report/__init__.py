# SPDX-License-Identifier: Apache-2.0
"""Plans and runs as self-contained HTML pages. Pictures of a run need matplotlib (`[report]`).

Results are shown in three ways, by all of our programs: a table in the terminal (``cli.common.table_text``), a PNG
(``pictures.new_figure``) and a page (``html``, and ``plan_page`` for plans).
"""
