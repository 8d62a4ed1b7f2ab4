"""VGG-16 with batch normalisation for small images, after Simonyan and Zisserman (2015)."""

from __future__ import annotations

from torch import Tensor, nn

CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """Layers are named as in published state dicts; `penultimate` gives the features for the heads."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in CHANNELS:
            for out in stage:
                layers += [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *(nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(512, classes),
        )

    def penultimate(self, x: Tensor) -> Tensor:
        """512 features per image of 32 x 32, the input of the classifier."""
        return self.features(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.penultimate(x))
