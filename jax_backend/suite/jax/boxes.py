"""Parameters in boxes that carry metadata, such as flax's `Partitioned`: taken out, and put back in.

A box is whatever has flax's methods `unbox` and `replace_boxed`; flax itself is not needed.
"""

from __future__ import annotations

from typing import Any

import jax


def is_box(x: Any) -> bool:
    return hasattr(x, "unbox") and hasattr(x, "replace_boxed")


def unbox(tree: Any) -> Any:
    """The pytree with every box's content in its place."""
    return jax.tree.map(lambda x: x.unbox() if is_box(x) else x, tree, is_leaf=is_box)


def rebox(values: Any, boxed: Any) -> Any:
    """`values`, a pytree like `unbox(boxed)`, in the boxes of `boxed`."""
    return jax.tree.map(
        lambda box, value: box.replace_boxed(value) if is_box(box) else value,
        boxed,
        values,
        is_leaf=is_box,
    )
