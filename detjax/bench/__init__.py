"""Measurement: what an operation costs on the device it runs on."""
