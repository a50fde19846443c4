"""Reports on run folders: tables, statements and pictures on one HTML page. `report(folder)` writes it,
`record(folder, out)` its tables alone.

groups    runs -> rows                      tables, columns    what a table is, which ones a task gets
claims    metrics -> sentences              typeset            tables in Markdown and LaTeX
plots     what all pictures share           plane, line, curves, hidden    the pictures
sections  all about one task                decisions          what policies do with the test data
page      the page and the files beside it      recorded_runs    the runs behind a record, which can grow
"""

from afield.report.page import record, report

__all__ = ["record", "report"]
