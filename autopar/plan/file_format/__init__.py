"""The formats of plan files: fields by their types, layers that are written once, and the text."""
