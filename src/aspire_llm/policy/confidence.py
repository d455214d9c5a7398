from __future__ import annotations
from aspire_llm.policy.acceptance import *
from aspire_llm.policy import acceptance as A
from aspire_llm.policy.base import CycleOutcome, RequestView
from aspire_llm.policy.cost import CostModel, ReadModel
from aspire_llm.policy.per_request import PerRequestPolicy
from aspire_llm.policy.rows import RowCosts
OWN=True; PKEEP=0.95; LOOK=3; PW=10.

class Confidence(PerRequestPolicy):
    def __init__(self, cost, reads, max_verify_tokens=None):
        super().__init__(cost, reads, max_verify_tokens)
        self.cal=Calibration(CONFIDENCE_PRIOR)
        self.nxt=Calibration((0.15,)*6+(.1,)*3+(.05,)*3+(.1,))
        self.cyc={}
        self.price={}   # key -> [tokens, cost]
        self.bprice=[1e-9,1e-9]
        self.last={}
    def _wants_draft(self, view, costs):
        key=view.key
        d=costs.draft(view.length, view.pending); v=costs.verify(view.length)
        self.last[key]=(d,v)
        st=self.cyc.get(key)
        known=len(view.confidences)
        if st is None or known<st[0] or view.pending==0: st=self.cyc[key]=[0,1.0,NUM_BINS]
        while st[0]<known:
            b=bin_of(view.confidences[st[0]]); st[1]*=1-self.cal.hazard(key,b); st[2]=b; st[0]+=1
        S=st[1]; b=st[2]
        q1=1-self.nxt.hazard(key,b)
        q0=1-self.nxt.hazard(key,NUM_BINS)
        for _ in range(view.pending-known): S*=q1; q1=q0
        p=self.price.get(key) if OWN else self.bprice
        if p is None: rate=self.bprice[0]/self.bprice[1]
        else:
            br=self.bprice[0]/self.bprice[1]
            rate=(p[0]+PW*v*br)/(p[1]+PW*v) if OWN else br
        rate=max(rate,1/v)
        gain=0.;s=S;q=q1
        for m in range(1,LOOK+1):
            s*=q; gain+=s-rate*d
            if gain>0: return True
            q=q0
        if view.pending==0 and self._may_probe(view,costs): return True
        return False
    def observe_cycle(self,o):
        key=o.key
        prev=NUM_BINS
        for i in range(min(o.drafted,o.accepted+1)):
            b=bin_of(o.confidences[i]); rej=i>=o.accepted
            self.cal.observe(key,b,rej); self.nxt.observe(key,prev,rej); prev=b
        d,v=self.last.get(key,(0,0))
        if v:
            p=self.price.setdefault(key,[0.,0.])
            t=1+o.accepted;c=o.drafted*d+v
            p[0]=PKEEP*p[0]+t;p[1]=PKEEP*p[1]+c
            k=.999
            self.bprice[0]=k*self.bprice[0]+t; self.bprice[1]=k*self.bprice[1]+c
    def forget(self,key):
        super().forget(key)
        self.cal.forget(key);self.nxt.forget(key);self.cyc.pop(key,None);self.price.pop(key,None);self.last.pop(key,None)
