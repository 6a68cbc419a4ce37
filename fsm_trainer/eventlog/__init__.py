"""The flight recorder's file: schema, writer and reader of `events.arrows`.

Import from the modules: `eventlog.schema`, `eventlog.writer`, `eventlog.reader`. This room knows the records of
`core.events` and Arrow; it decides nothing and interprets nothing.
"""
