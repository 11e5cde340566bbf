"""All benchmarks of the cost of pins.

python benchmarks --quick --json figures.json
"""

import compiled
import hooks
import measure
import scale
import step

measure.main(__doc__, hooks.run, hooks.run_parameters, step.run, scale.run, compiled.run)
