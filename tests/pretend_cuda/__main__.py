"""`python -m tests.pretend_cuda GUARD CASES`: load the guard, then torch, then run `trial`."""

import ctypes
import runpy
import sys

ctypes.CDLL(sys.argv[1])
runpy.run_module("tests.pretend_cuda.trial", run_name="__main__")
