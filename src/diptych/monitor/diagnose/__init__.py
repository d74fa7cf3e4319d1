"""What bounds a run: its step records and its nodes' samples in, findings with evidence out.

`signals` makes plain numbers of the records, each rule of `rules/` reads them and names one bound
or none, `diagnose` orders what they found, `compare` splits the difference of two runs. Nothing
here reads a file, and nothing changes a setting.
"""
