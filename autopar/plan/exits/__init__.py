"""A plan as the configuration of another tool, and such a configuration as degrees of a plan by hand.

    Plan --plan_degrees.py--> Degrees --TOOL.py--> ToolConfiguration     what the tool cannot express is listed by name
    text, file or object of the tool --TOOL.py--> ToolDegrees --Plan.by_hand--> Plan

Each tool has one file, with `configuration_of(plan)` and `degrees_in(source)`.
"""
