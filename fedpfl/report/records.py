"""Names of types that all files of the report share."""

from __future__ import annotations

from fedpfl.ground.records import Record as Record
from fedpfl.ground.records import Values as Values
