"""Sandbox for programs that a policy wrote: limits its own process, then runs the code on stdin.

    python -I confinement.py SECONDS BYTES_OF_MEMORY BYTES_OF_FILES < program.py

Time, memory, file size and processes are limited with setrlimit. Network access is blocked by a
seccomp filter that makes the kernel refuse sockets; it needs no privileges and cannot be removed.
This does not stop an attacker: the program can still read every file that its user can read.
Uses the standard library only, since the program runs in an empty environment.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import traceback
from types import TracebackType

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of classic BPF
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x80000000
NUMBER_OFFSET, ARCHITECTURE_OFFSET = 0, 4  # in the kernel's struct seccomp_data
X32_FIRST_CALL = 0x40000000
"""First number of the x32 ABI's system calls on x86-64, which this project never uses."""
CALLS = {
    # The kernel's AUDIT_ARCH value, then the numbers of: socket, ptrace, process_vm_writev,
    # io_uring_setup (which can create sockets too), kill, tkill, tgkill, rt_sigqueueinfo,
    # rt_tgsigqueueinfo, pidfd_send_signal, setpgid and setsid (the caller kills the program and its
    # children by session, so they must not leave).
    "x86_64": (0xC000003E, (41, 101, 311, 425, 62, 200, 234, 129, 297, 424, 109, 112)),
    "aarch64": (0xC00000B7, (198, 117, 271, 425, 129, 130, 131, 138, 240, 424, 154, 157)),
}


def refuse_network_and_signals() -> None:
    """Install a seccomp filter against sockets and access to other processes. Raises OSError."""
    if platform.machine() not in CALLS:
        raise OSError(f"no list of system calls for {platform.machine()}; have {', '.join(CALLS)}")
    architecture, refused_calls = CALLS[platform.machine()]
    instructions = [
        (LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD_WORD, 0, 0, NUMBER_OFFSET),
        (AT_LEAST, 0, 1, X32_FIRST_CALL),
        (RETURN, 0, 0, KILL),
    ]
    for number in refused_calls:
        instructions += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    instructions.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in instructions))
    # struct sock_fprog: the number of instructions and a pointer to them.
    fprog = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    header = ctypes.create_string_buffer(fprog)
    filter_arguments = (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), filter_arguments):
        if libc.prctl(*map(ctypes.c_ulong, arguments)):
            raise OSError(ctypes.get_errno(), "the kernel has no seccomp filters")


def set_limits(seconds: int, memory: int, files: int) -> None:
    """Limit CPU seconds, address space and file size (bytes), and forbid child processes."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # RLIMIT_NPROC does not bind root, but the caller kills the whole session in any case.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def print_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception of the program without the stack frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def main() -> None:
    """Restrict this process, then run the program on standard input."""
    source = sys.stdin.read()
    set_limits(*map(int, sys.argv[1:4]))
    refuse_network_and_signals()
    sys.argv, sys.excepthook = ["program.py"], print_exception
    sys.path.insert(0, os.getcwd())
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
