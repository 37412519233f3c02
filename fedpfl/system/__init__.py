"""Devices in simulated time: how fast clients compute and send, and what slowness does."""

from fedpfl.system.devices import PROFILES, SYSTEMS, Device, System, draw_devices, draw_stragglers

__all__ = ["PROFILES", "SYSTEMS", "Device", "System", "draw_devices", "draw_stragglers"]
