"""Reports as HTML: `page.py` renders a `Report` with the templates beside it, one macro per kind of block."""
