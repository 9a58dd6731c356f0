"""Image classifiers by name: our own, timm's, torchvision's, or a function in the user's file."""

from __future__ import annotations

from hasten.vision.models.build import create, describe, from_description, names
from hasten.vision.models.external import failure
from hasten.vision.models.lesson import Lesson
from hasten.vision.models.resnet import ResNet
from hasten.vision.models.small import Small

__all__ = [
    "Lesson",
    "ResNet",
    "Small",
    "create",
    "describe",
    "failure",
    "from_description",
    "names",
]
