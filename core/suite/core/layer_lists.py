"""The layers of known models, as K-FAC sees them: for plans made before any machine is rented."""

from __future__ import annotations

from suite.core.placement import LayerShape


def resnet50(classes: int = 1000) -> list[LayerShape]:
    """Convolutions without bias and the classifier.

    Source: He et al. 2016 (arXiv:1512.03385), table 1.
    """
    layers = [LayerShape((3 * 49, 64))]
    width = 64
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            layers += [
                LayerShape((width, inner)),
                LayerShape((9 * inner, inner)),
                LayerShape((inner, 4 * inner)),
            ]
            if block == 0:  # the shortcut's projection
                layers.append(LayerShape((width, 4 * inner)))
            width = 4 * inner
    return [*layers, LayerShape((width + 1, classes))]


def gpt(
    layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024
) -> list[LayerShape]:
    """Embeddings (tied to the head) and the four products of each block, with biases.

    Source: Radford et al. 2019, GPT-2's smallest model by default.
    """
    block = [
        LayerShape((width + 1, 3 * width)),
        LayerShape((width + 1, width)),
        LayerShape((width + 1, 4 * width)),
        LayerShape((4 * width + 1, width)),
    ]
    tables = [LayerShape((rows, width), (True, False)) for rows in (vocabulary, context)]
    return tables + layers * block
