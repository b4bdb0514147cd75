"""From run folders to what people look at: a page, a live page, figures for a paper, tables in a terminal.

    reading.py, states.py   run folders -> plain dataclasses; nothing else here opens a run's files
    facts.py, helping.py    dataclasses -> numbers: means over clients and seeds, who helped whom
    figures.py, ...         numbers -> figures as data, each with a sentence that says what is to be seen
    page.py                 figures -> one page;  watching.py serves it while a run goes on
    papers.py, style.py     the same numbers as figures for a paper;  terminal.py as text;  boards.py for TensorBoard

Nothing here loads torch or what learns: a report is made from the folder alone, on any machine.
"""
