"""Imports of users' files, for packages that import nothing else of `verl`, such as the rewards."""

from verl.user_files import execute_file, import_lock, module_name

__all__ = ["execute_file", "import_lock", "module_name"]
