"""Put tracefit/evaluator.py beside this file as the module that is packed: one text, two distributions.

A copy at build time, because a link in the tree is lost in archives and on some systems. A source distribution holds
the copy.
"""

from pathlib import Path
from shutil import copyfile

from setuptools import setup

HERE = Path(__file__).parent
original, module = HERE.parent / "tracefit/evaluator.py", HERE / "tracefit_evaluator.py"
if original.is_file():
    copyfile(original, module)
elif not module.is_file():
    raise SystemExit(f"{original} is missing: tracefit-evaluator is built in a checkout of tracefit or from its sdist")
setup()
