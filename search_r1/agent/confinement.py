"""What confines a program that a policy wrote: run as a script, it limits itself, then runs stdin.

    python -I confinement.py SECONDS BYTES_OF_MEMORY BYTES_OF_FILES < program.py

Limits of time, memory, files and processes are the kernel's (setrlimit). Without network means that
the kernel refuses to make sockets (a seccomp filter, which needs no privileges and cannot be taken
back). It is not a wall against an attacker: the program can still read the files that its user can.
Standard library only, since the program runs in an empty environment.
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
OFFSET_OF_NUMBER, OFFSET_OF_ARCHITECTURE = 0, 4  # in the kernel's struct seccomp_data
X32_CALLS = 0x40000000
"""From here on x86-64 numbers the calls of its 32-bit twin, which nothing of ours uses."""
CALLS = {
    # The kernel's name of the architecture, then: socket, ptrace, process_vm_writev, io_uring_setup
    # (which makes sockets too), kill, tkill, tgkill, pidfd_send_signal, setpgid and setsid (the
    # caller ends a program with all it started by its session).
    "x86_64": (0xC000003E, (41, 101, 311, 425, 62, 200, 234, 424, 109, 112)),
    "aarch64": (0xC00000B7, (198, 117, 271, 425, 129, 130, 131, 424, 154, 157)),
}


def refuse_network_and_signals() -> None:
    """Have the kernel refuse sockets and reaching into other processes. Raises OSError."""
    if platform.machine() not in CALLS:
        raise OSError(f"no list of system calls for {platform.machine()}; have {', '.join(CALLS)}")
    architecture, refused = CALLS[platform.machine()]
    lines = [
        (LOAD_WORD, 0, 0, OFFSET_OF_ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD_WORD, 0, 0, OFFSET_OF_NUMBER),
        (AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, KILL),
    ]
    for number in refused:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    lines.append((RETURN, 0, 0, ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    # struct sock_fprog: the number of instructions, and where they are.
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0),
    ):
        if libc.prctl(*(ctypes.c_ulong(argument) for argument in call)):
            raise OSError(ctypes.get_errno(), "the kernel has no seccomp filters")


def limit(seconds: int, memory: int, files: int) -> None:
    """Bound processor seconds, address space and file sizes (bytes), and allow no processes."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Root is not bound by the number of processes; the caller ends the whole session anyway.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of the program without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def main() -> None:
    """Confine this process, then run what stands on standard input."""
    source = sys.stdin.read()
    limit(*(int(argument) for argument in sys.argv[1:4]))
    refuse_network_and_signals()
    sys.argv, sys.excepthook = ["program.py"], show
    sys.path.insert(0, os.getcwd())
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
