"""Work that is due after a step: reports, facts of all ranks, rollback, saves, and the list that has their order."""
