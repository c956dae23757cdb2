"""Under which names files have the weights of a known family, where those are not the names in the model.

transformers changes names from version to version, and converts them when it loads a file and when it saves one. Here
are the same rules, without its code: the name in a file is the first of these that the model has.

    vit.encoder.layer.0.attention.attention.query.weight     as it is
    vit.layers.0.attention.q_proj.weight                     renamed
    h.0.ln_1.weight -> transformer.h.0.ln_1.weight           with the prefix that the base model's own file leaves out
"""

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredNames:
    """`renamed`: regular expressions and what stands in their place, one after the other, each once in a name. `base`:
    the name of the base model in the model. `unused`: a regular expression of what older files have, and the model
    computes."""

    renamed: tuple[tuple[str, str], ...] = ()
    base: str = ""
    unused: str = r"(?!)"

    def in_model(self, name: str, known: Collection[str]) -> str | None:
        """What the model, whose names are `known`, calls the entry `name` of a file: `name` itself if it knows none;
        None for an entry that it does not use."""
        renamed = name
        for pattern, replacement in self.renamed:
            renamed = re.sub(pattern, replacement, renamed, count=1)
        found = next((each for each in (name, renamed, f"{self.base}.{renamed}") if each in known), None)
        return found or (None if re.search(self.unused, name) else name)


SAME = StoredNames()
POSITIONS = r"(^|\.)position_ids$"
# As TensorFlow called them.
LAYER_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
