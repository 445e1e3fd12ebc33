"""`autopar doctor`: what of this machine may make autopar slow or fail, and what would help.

    machine.py   the facts: versions, devices, environment variables, network, cache, terminal
    checks.py    what is wrong with such facts, and what would help: pure functions
    links.py     devices and links, measured
    command.py   the command, its text and its JSON

Nothing here imports the rest of autopar before it is known that torch can be imported and is new enough.
"""
