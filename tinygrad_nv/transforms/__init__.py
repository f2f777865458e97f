"""Functions made of functions: derivatives, batches, captured steps and loops, devices.

Protocol. A transform takes a pure function of trees of Tensors (dicts, lists, tuples, named tuples,
dataclasses) and gives another one; any of them can be applied to what another gives. A function is called
once to build its graph, so its values cannot be read inside: no `item`, no `if` on an element.

    grad, value_and_grad, vjp, jvp      derivatives (gradients.py); jacrev, jacfwd, hessian (jacobians.py)
    custom_vjp, custom_jvp, custom_vmap functions with derivatives or batches of their own (custom.py)
    vmap                                a dimension of examples, no loop (vmap.py, batching/)
    jit, scan                           captured steps: of a call (jit.py), of a loop (scan.py)
    checkpoint                          values computed again for the backward pass (train/regions/)
    pmap                                examples over the devices of a mesh (vmap.py)
    autodiff                            a function with its derivatives as attributes (gradients.py)

Reading order: `trees`, `tracing`, `gradients`, `custom`, `batching/`, `vmap`, then the others.
"""
from tinygrad_nv.train.regions import checkpoint
from tinygrad_nv.transforms.custom import custom_jvp, custom_vjp, custom_vmap
from tinygrad_nv.transforms.gradients import autodiff, grad, jvp, value_and_grad, vjp
from tinygrad_nv.transforms.jacobians import hessian, jacfwd, jacrev
from tinygrad_nv.transforms.jit import jit
from tinygrad_nv.transforms.scan import scan
from tinygrad_nv.transforms.trees import flatten, map_tree, register_tree
from tinygrad_nv.transforms.vmap import pmap, vmap

__all__ = ["autodiff", "checkpoint", "custom_jvp", "custom_vjp", "custom_vmap", "flatten", "grad",
           "hessian", "jacfwd", "jacrev", "jit", "jvp", "map_tree", "pmap", "register_tree", "scan",
           "value_and_grad", "vjp", "vmap"]
