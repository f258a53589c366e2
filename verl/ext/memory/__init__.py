"""Estimates how much memory a run needs in each phase, and checks that this machine has it.

`trial` measures a forward and backward pass on meta tensors, `needs` lists what ranks and engines
hold, `estimate` sums it up, `check` compares it with the machine and decides what is offloaded.
"""
