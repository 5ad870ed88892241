"""Train a residual network on CIFAR-10, with K-FAC, Kron, AdamW or SGD.

    python train_cifar10.py --data cifar-10-batches-py --amp bf16 --checkpoint run.pt --output run.json
    python train_cifar10.py --fake-data --epochs 3

--data is the folder inside cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import torch

import resnets
import training
import vision


def main() -> None:
    parser = vision.parser(__doc__, epochs=100, batch_size=128, size=32)
    parser.add_argument("--depth", type=int, choices=(20, 32, 44, 56), default=20)
    parser.add_argument(
        "--width", type=training.whole, default=16, help="channels at first (default: 16)"
    )
    options = training.parse(parser)
    classes = 10
    if options.fake_data:
        classes = options.fake_classes
        data = vision.fake_images(options.fake_images, options.size, classes, options.seed)
    else:
        data = vision.cifar10(options.data)
    torch.manual_seed(options.seed)
    vision.train(options, resnets.cifar_resnet(options.depth, options.width, classes), data)


if __name__ == "__main__":
    main()
