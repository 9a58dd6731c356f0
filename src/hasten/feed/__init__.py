"""From a data set to batches on the device, by a plan that is measured, printed and overridable."""

from __future__ import annotations

from hasten.feed.keys import SampleRandom, sample_key, sample_keys
from hasten.feed.loader import Loader
from hasten.feed.ondevice import DeviceLoader
from hasten.feed.plan import Plan

__all__ = ["DeviceLoader", "Loader", "Plan", "SampleRandom", "sample_key", "sample_keys"]
