"""Inspect modules: train and eval modes, BatchNorm statistics, functional calls, identical units."""
