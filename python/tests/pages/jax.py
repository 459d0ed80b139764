import functools

import jax
import jax.numpy as jnp
import jax_cases as cases
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

hidden, weight, labels, *_ = cases.case((4, 16), classes=320)
mesh = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))
