"""How much memory a run needs, in which phase, and whether this machine has it.

`trial` measures a forward and backward on fake tensors, `needs` says what ranks and engines hold,
`estimate` adds up, `check` compares with the machine and chooses what waits on the host.
"""
