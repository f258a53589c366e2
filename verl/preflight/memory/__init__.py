"""How much memory a run needs, and what uses it: the estimate before a run, the watch during it.

`shape` counts a model's parameters, `ranks`, `engine` and `node` say what each part of a run holds
and in which phase, `estimate` adds them up, `fitting` compares with the machine and looks for
settings that fit, `watch` reads the host's memory while a run goes on. Nothing here starts work.
"""
