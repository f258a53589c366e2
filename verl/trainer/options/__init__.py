"""From a command line to a checked configuration: names, overrides, rules, the machine."""
