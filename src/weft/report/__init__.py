"""Run folders for people: a page, a live page, figures for a paper, tables in a terminal. Nothing here loads torch.

reading.py, states.py         run folders and checkpoints as dataclasses
facts.py                      means over clients and seeds, attention, gain
charts/                       lines, bars and heat maps as data, each with a sentence
plotly.py, matplotlib.py      the two renderers of a chart
page.py, watch.py             the page, and the page of a run in progress
terminal.py, trackers.py      rich tables; TensorBoard
"""
