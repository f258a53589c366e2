"""For tools that expect a setup.py; everything is in pyproject.toml."""

from setuptools import setup

setup()
