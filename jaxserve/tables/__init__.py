"""Plans become fixed-shape padded tables. numpy only."""

from jaxserve.tables.buckets import Bucket, BucketTable, num_programs
from jaxserve.tables.builder import StepTables, TableBuilder
from jaxserve.tables.layout import TableLayout

__all__ = ["Bucket", "BucketTable", "StepTables", "TableBuilder", "TableLayout", "num_programs"]
