"""Train ResNet-50 on ImageNet, or on any folder of images, with K-FAC, Kron, AdamW or SGD.

    python train_imagenet.py --data imagenet --amp bf16 --workers 16 --accumulate 4 --output run.json
    python train_imagenet.py --fake-data --size 32 --width 8 --batch-size 32 --epochs 3

--data has the folders train and val, with one folder of images per class in each.
"""

from __future__ import annotations

import torch

import resnets
import training
import vision


def main() -> None:
    parser = vision.parser(__doc__, epochs=60, batch_size=256, size=224)
    parser.add_argument(
        "--width", type=training.whole, default=64, help="channels at first (default: 64)"
    )
    options = training.parse(parser)
    if options.fake_data:
        data = vision.fake_images(options.fake_images, options.size, options.fake_classes, options.seed)
    else:
        data = vision.image_folders(options.data, options.size)
    classes = int(data[0].labels.max()) + 1
    torch.manual_seed(options.seed)
    vision.train(options, resnets.resnet50(options.width, classes), data)


if __name__ == "__main__":
    main()
