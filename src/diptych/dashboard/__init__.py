"""`kedro dashboard`: folders of runs in, a local page over them out; nothing is written to a run.

`columns` makes numbers of lines, `logs` keeps them while files grow, `cache` between servers, and
`thin` makes curves of as many points as a screen shows; `charts` says what is drawn, `figures`
draws it, `facts` and `answers` are what is told in words; `page` lays it out, `server` serves it.
"""
