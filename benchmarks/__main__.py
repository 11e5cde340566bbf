"""All benchmarks of the cost of pins.

They need the ``bench`` extra and a C++ compiler::

    python benchmarks --json figures.json           # a quarter of an hour
    python benchmarks --quick --json figures.json   # under three minutes, rougher
"""

import compiled
import hooks
import measure
import scale
import step

measure.main(__doc__, hooks.run, hooks.run_parameters, step.run, scale.run, compiled.run)
