"""Reports as HTML: `page.py` renders a `Report` with the templates in `templates/`, one macro per kind of block."""
