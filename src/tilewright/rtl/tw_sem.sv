// tw_sem: the 32 counting semaphores.
//
// Implements the semaphores of "Engines: common" of docs/concepts/microarchitecture.md: every take
// and every signal of a cycle counts. Sides 0..5 are the engines, 6 the sequencer.

module tw_sem import tw_pkg::*; (
    input  logic             clk,
    input  logic             rst,
    input  logic [7:0]       fault,
    input  logic [6:0]       take_valid,
    input  logic [6:0][31:0] take,
    input  logic [6:0]       give_valid,
    input  logic [6:0][31:0] give,
    output logic [31:0]      zero  // state
);
  wire f_semaphore_lost = FAULTS_BUILT && fault == FAULT_SEMAPHORE_LOST;

  logic [31:0][15:0] count_q;
  logic [31:0] zero_q;

  assign zero = zero_q;

  always_ff @(posedge clk) begin
    if (rst) begin
      count_q <= '0;
      zero_q <= '1;
    end else if (take_valid != '0 || give_valid != '0) begin
      automatic logic [31:0][15:0] next = count_q;
      automatic logic given = 1'b0;  // by a side before this one
      for (int unsigned e = 0; e < 7; e++) begin
        if (take_valid[e])
          for (int unsigned i = 0; i < 32; i++) next[i] -= 16'(take[e][i]);
        if (give_valid[e] && give[e] != '0) begin
          if (!(f_semaphore_lost && given))
            for (int unsigned i = 0; i < 32; i++) next[i] += 16'(give[e][i]);
          given = 1'b1;
        end
      end
      count_q <= next;
      for (int unsigned i = 0; i < 32; i++) zero_q[i] <= next[i] == '0;
    end
  end
endmodule
