from tests.parallel.test_pipeline import *
@pytest.mark.parametrize(("ranks","parallel"), [(2, layout("zero_bubble", pipeline={"stages_by_hand": [2, 3]})),(3, layout("zero_bubble", 3, pipeline={"stages_by_hand": [3, 1,1]})), (3, layout("zero_bubble", 3, pipeline={"stages_by_hand": [1, 2,2]}))])
def test_tmp(ranks, parallel, pair, pool):
    same(pool, pair, ranks, PAIR, parallel, objective=SPAN)
