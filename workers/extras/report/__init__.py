"""Page of a run, in a file or live.

May import `runs` and below. Read `facts.py` first: the page's data. `page.py` makes the page of it, with the files in
`assets`; `dashboard.py` serves it.
"""
